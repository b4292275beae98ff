"""What a drafter is worth, measured on prompts it was not trained on."""
