"""Measurements of a running system: real processes, real prompts, ratios within one run."""
