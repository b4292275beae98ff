"""From the text of a setting to a planner."""

import re

from dspark.core.errors import ConfigError
from dspark.core.planner.baselines import FixedPlanner, NonePlanner, ThresholdPlanner
from dspark.core.planner.capacity import CapacityPlanner
from dspark.core.planner.causal import CausalPlanner
from dspark.core.planner.interface import Planner


def parse_planner(text: str) -> Planner:
    """The planner named `text`: none, fixed:K, threshold:S, causal or capacity.

    Raises ConfigError for anything else.
    """
    match text.split(":"):
        case ["none"]:
            return NonePlanner()
        case ["causal"]:
            return CausalPlanner()
        case ["capacity"]:
            return CapacityPlanner()
        case ["fixed", length] if re.fullmatch(r"[0-9]+", length):
            return FixedPlanner(int(length))
        case ["threshold", survival] if re.fullmatch(r"[0-9]*\.?[0-9]+", survival):
            return ThresholdPlanner(float(survival))
    raise ConfigError(
        f"No planner is called {text!r}: choose none, fixed:K (K tokens), threshold:S (a survival "
        f"above 0 and up to 1), causal or capacity."
    )
