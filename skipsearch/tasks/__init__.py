"""Tasks: the prompts that a search tunes on and reports on, and how text is generated from them.

task = load_task("pycode")                     # a name, a folder with a task.yaml, or a .jsonl
task = load_task("gsm8k", data="gsm8k.jsonl")  # the same task on local text
task.calibration[0].text, task.calibration_sha256

load              `load_task`: from a name or a path to a task
task              `Task`, `Prompt`, `TaskSampling`: what a loaded task is
manifest          the schema of task.yaml and its reader
sources           where rows come from: .jsonl files, the Hub, Python's standard library
rows              rows of a source, with columns renamed and filtered
prompt_rows       from rows to prompts, with a template and worked examples
prompt_template   templates with `{column}` in them
split             splits prompts into calibration and hold-out
task_files        opens the files of a task, none outside its folder
check_task        checks tasks before they are shared
"""

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
