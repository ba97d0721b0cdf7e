"""The options that these scripts share."""

from __future__ import annotations

import argparse

import torch

from skipsearch.engine import load_model
from skipsearch.models.adapter import ModelAdapter


def make_parser(
    description: str | None, *, dtype: str = "float32", engine: str = "lean", task: bool = True
) -> argparse.ArgumentParser:
    """Return a parser of the options for model, task, dtype, engine, threads and seed.

    task: False if the script declares its own option --task.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    if task:
        parser.add_argument("--task", default="pycode")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default=dtype)
    parser.add_argument("--quantization")
    parser.add_argument("--engine", default=engine)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    return parser


def make_text_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of a model's name and of the options for a task's text."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--task", required=True)
    parser.add_argument("--data", help="a file with the text of a published task")
    parser.add_argument("--chat", action="store_true", help="prompts are requests to a chat model")
    return parser


def load_chosen_model(args: argparse.Namespace) -> ModelAdapter:
    """Load the model that the options name, and set the number of threads."""
    torch.set_num_threads(args.threads)
    return load_model(
        args.model, args.device, args.dtype, quantization=args.quantization, engine=args.engine
    )
