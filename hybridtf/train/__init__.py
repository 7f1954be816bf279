"""Training: the loop, precision, checkpoints that resume bit for bit, and the held-out loss."""

from hybridtf.train.checkpoint import LoadedRun, RunFolder, load_model, load_run, save_model
from hybridtf.train.config import MuonOptions, RoleOptions, TeacherOptions, TrainConfig, train_config
from hybridtf.train.evaluate import DocumentScore, EvalResult, evaluate
from hybridtf.train.interrupt import Interrupted, Terminated
from hybridtf.train.log import read_log
from hybridtf.train.loop import train
from hybridtf.train.optimizer import build_optimizer, parameter_groups
from hybridtf.train.results import StepReport, TrainResult, planned_steps
from hybridtf.train.schedule import lr_factor

__all__ = [
    "DocumentScore", "EvalResult", "Interrupted", "LoadedRun", "MuonOptions", "RoleOptions", "RunFolder", "StepReport",
    "TeacherOptions", "Terminated", "TrainConfig", "TrainResult", "build_optimizer", "evaluate", "load_model", "load_run",
    "lr_factor", "parameter_groups", "planned_steps", "read_log", "save_model", "train", "train_config",
]
