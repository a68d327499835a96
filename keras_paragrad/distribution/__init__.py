"""Data-parallel training on many devices: detected hardware, the plan for it, and the step itself."""

from typing import TYPE_CHECKING

from keras_paragrad.exports import lazily

if TYPE_CHECKING:
    from keras_paragrad.distribution import servers
    from keras_paragrad.distribution.checkpoint.backup import Backup
    from keras_paragrad.distribution.checkpoint.files import DamagedBackupError
    from keras_paragrad.distribution.checkpoint.interruptions import WorkerLostError
    from keras_paragrad.distribution.checkpoint.writers import with_one_writer
    from keras_paragrad.distribution.data import (
        FollowEpochs,
        adapt_normalization,
        distributed_dataset,
        normalize_inputs,
    )
    from keras_paragrad.distribution.fit import DistributedFit
    from keras_paragrad.distribution.hardware import describe, detect
    from keras_paragrad.distribution.options import Options
    from keras_paragrad.distribution.pipeline.pipeline import Pipeline
    from keras_paragrad.distribution.plan import Explanation, make_plan

__all__ = [
    "Backup",
    "DamagedBackupError",
    "DistributedFit",
    "Explanation",
    "FollowEpochs",
    "Options",
    "Pipeline",
    "WorkerLostError",
    "adapt_normalization",
    "describe",
    "detect",
    "distributed_dataset",
    "make_plan",
    "normalize_inputs",
    "servers",
    "with_one_writer",
]
__getattr__, __dir__ = lazily(
    __name__,
    {
        "Backup": "checkpoint.backup",
        "DamagedBackupError": "checkpoint.files",
        "DistributedFit": "fit",
        "Explanation": "plan",
        "FollowEpochs": "data",
        "Options": "options",
        "Pipeline": "pipeline.pipeline",
        "WorkerLostError": "checkpoint.interruptions",
        "adapt_normalization": "data",
        "describe": "hardware",
        "detect": "hardware",
        "distributed_dataset": "data",
        "make_plan": "plan",
        "normalize_inputs": "data",
        "servers": "servers",
        "with_one_writer": "checkpoint.writers",
    },
)
