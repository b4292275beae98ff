"""A checkpoint in another form."""

import shutil
from pathlib import Path

from dspark.core.errors import DrafterError
from dspark.modeling.drafters.checkpoint import CALIBRATION, CARD, load_drafter, save_drafter
from dspark.modeling.drafters.config import read_json
from dspark.modeling.drafters.formats import CONFIG, deepspec


def convert_drafter(
    folder: Path, out: Path, target_folder: Path, *, for_deepspec: bool = False
) -> None:
    """Write the drafter in ``folder`` into ``out``, in our form or in DeepSpec's, with its
    calibration and card if it has them.

    Raises:
        DrafterError: it cannot be read, does not fit the target, has something that the form
            cannot say, or ``out`` holds something already.
        TargetError: the target's own weights cannot be read.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DrafterError(f"{out} exists and is no empty folder; write the drafter somewhere else")
    model = load_drafter(folder, target_folder)
    if for_deepspec:
        deepspec.write(model, out, target_folder, read_json(folder / CONFIG, "drafter config"))
    else:
        save_drafter(model, out)
    for name in (CALIBRATION, CARD):
        if (folder / name).exists():
            shutil.copyfile(folder / name, out / name)
