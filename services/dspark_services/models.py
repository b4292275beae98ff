"""From settings to loaded workers: which target, which drafter, what both sides share."""

import contextlib
import ctypes
import logging
from pathlib import Path

import torch
import transformers

from dspark.core.errors import DrafterError
from dspark.modeling.backbone import LocalBackbone
from dspark.modeling.draft_worker import DraftWorker
from dspark.modeling.drafters.checkpoint import load_calibration, load_drafter, resolve_drafter
from dspark.modeling.drafters.shared import load_shared
from dspark.modeling.head import LocalHead
from dspark.modeling.linear import Precision, resolve_precision
from dspark.modeling.target_worker import TargetWorker
from dspark.modeling.targets import resolve_target, target_digest
from dspark.ops.settings import Settings
from dspark_services.process import new_incarnation

log = logging.getLogger(__name__)


def target_folder(settings: Settings) -> Path:
    """The target's checkpoint folder, fetched and converted first if need be."""
    return resolve_target(settings.target, settings.cache_dir, progress=log.info)


def drafter_folder(settings: Settings) -> Path | None:
    """The drafter's checkpoint folder; None to run without one.

    Raises:
        DrafterError: the setting names neither a packaged drafter nor a folder.
    """
    return resolve_drafter(settings.drafter) if settings.has_drafter else None


def load_target_worker(settings: Settings) -> TargetWorker:
    """Load the target, its head and the drafter's shared parts, as the settings say."""
    folder = target_folder(settings)
    precision = _prepare_torch(settings)
    drafter = drafter_folder(settings)
    shared = None if drafter is None else load_shared(drafter, folder, precision)
    log.info("loading the target", extra={"folder": str(folder), "precision": precision})
    backbone = LocalBackbone(
        folder,
        precision,
        tap_layers=() if shared is None else shared.config.target_layer_ids,
        num_blocks=settings.kv_tokens // settings.kv_block_size,
        block_size=settings.kv_block_size,
        feature_dim=0 if shared is None else shared.config.hidden_size,
    )
    worker = TargetWorker(
        backbone,
        LocalHead.from_folder(folder, precision),
        shared,
        incarnation=new_incarnation(),
        model_id=settings.model_name,
        target_digest=target_digest(folder),
        precision=precision,
    )
    _release_freed_memory()
    return worker


def load_draft_worker(settings: Settings) -> DraftWorker:
    """Load the drafter and its calibration.

    Raises:
        DrafterError: there is none to load, or it does not fit the target.
    """
    drafter = drafter_folder(settings)
    if drafter is None:
        raise DrafterError(
            f"--drafter {settings.drafter} leaves nothing for a drafter process to load"
        )
    folder = target_folder(settings)
    precision = _prepare_torch(settings)
    log.info("loading the drafter", extra={"folder": str(drafter), "precision": precision})
    model = load_drafter(drafter, folder)
    worker = DraftWorker(
        model,
        name=drafter.name,
        incarnation=new_incarnation(),
        target_digest=target_digest(folder),
        precision=precision,
        calibration=load_calibration(drafter, model.config),
    )
    _release_freed_memory()
    return worker


def _release_freed_memory() -> None:
    """Hand back to the system what loading has freed, which glibc would keep: 200 MB of a small
    target's process."""
    with contextlib.suppress(AttributeError):  # another C library has no such function
        ctypes.CDLL(None).malloc_trim(0)


def _prepare_torch(settings: Settings) -> Precision:
    torch.set_num_threads(settings.num_threads)
    # Its load reports name tensors that are left out on purpose.
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    return resolve_precision(settings.precision)
