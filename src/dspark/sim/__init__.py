"""The engine under a virtual clock: what a planner would do, on paper and in seconds."""
