"""Export: a profile's skip drafter as a checkpoint of its own, for engines that draft with a second model.

    run              `export`: from a profile and its model to a folder, whole or not at all
    draft            what of a recipe can be carried, and what stays behind
    source           the model's checkpoint on disk, and whether the profile belongs to it
    hf               whole layers out: an ordinary Hugging Face checkpoint
    deci             sub-layers out: DeciLM (Nemotron-NAS)
    weights          tensors from one checkpoint to another, a shard at a time
    readme           how to run it: vLLM, SGLang, TensorRT-LLM, llama.cpp, Transformers
"""

from skipsearch.export.run import FORMATS, export

__all__ = ["FORMATS", "export"]
