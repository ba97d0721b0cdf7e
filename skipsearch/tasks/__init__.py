"""Tasks: which prompts a search tunes on and reports on, and how text is generated from them.

task = load_task("pycode")                        # a name, a folder with a task.yaml, or a .jsonl
of {"prompt": …} lines task = load_task("gsm8k", data="gsm8k.jsonl")     # the same task on local
text task.calibration[0].text, task.calibration_sha256"""

from skipsearch.tasks.load import (
    data_folder,
    load_task,
    manifest_path,
    task_files,
    task_name,
    task_names,
)
from skipsearch.tasks.sources.jsonl import read_prompts
from skipsearch.tasks.task import Prompt, Task, TaskSampling

__all__ = [
    "Prompt",
    "Task",
    "TaskSampling",
    "data_folder",
    "load_task",
    "manifest_path",
    "read_prompts",
    "task_files",
    "task_name",
    "task_names",
]
