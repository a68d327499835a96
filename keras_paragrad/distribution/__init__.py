"""Data-parallel training on many devices: detected hardware, the plan for it, and the step itself."""

from typing import TYPE_CHECKING

from keras_paragrad.exports import lazily

if TYPE_CHECKING:
    from keras_paragrad.distribution import servers as servers
    from keras_paragrad.distribution.checkpoint.backup import Backup as Backup
    from keras_paragrad.distribution.checkpoint.files import DamagedBackupError as DamagedBackupError
    from keras_paragrad.distribution.checkpoint.interruptions import WorkerLostError as WorkerLostError
    from keras_paragrad.distribution.checkpoint.writers import with_one_writer as with_one_writer
    from keras_paragrad.distribution.data import FollowEpochs as FollowEpochs
    from keras_paragrad.distribution.data import distributed_dataset as distributed_dataset
    from keras_paragrad.distribution.fit import DistributedFit as DistributedFit
    from keras_paragrad.distribution.hardware import detect as detect
    from keras_paragrad.distribution.options import Options as Options
    from keras_paragrad.distribution.pipeline.pipeline import Pipeline as Pipeline
    from keras_paragrad.distribution.plan import Explanation as Explanation
    from keras_paragrad.distribution.plan import make_plan as make_plan

__getattr__, __dir__, __all__ = lazily(__name__)
