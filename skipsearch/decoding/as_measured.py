"""Load a model as a profile was measured, with the decoder of the profile."""

from __future__ import annotations

import os
from pathlib import Path

from skipsearch.core.machine import describe_machine
from skipsearch.decoding.decoder import Decoder
from skipsearch.decoding.validation import profile_type_error
from skipsearch.engine import load_for_switching, pick_fastest, switch_engine
from skipsearch.models.loading.placement import pick_device
from skipsearch.models.loading.quantize import loadable_quantization
from skipsearch.profile import Profile, load_profile
from skipsearch.profile.model_locations import model_argument


def load_decoder(
    profile: Profile | str | Path,
    model: str | None = None,
    device: str = "auto",
    exact: bool = False,
) -> Decoder:
    """Load the model of a profile as the profile was measured, and return the profile's decoder.

    The model has the dtype, the quantization and the engine of the profile, as with
    `skipsearch decode --profile FILE`. If the engine is not available here, the fastest one is
    taken, and `decoder.warnings` says so. On another type of device than the profile's, the model
    is loaded as without a profile. The number of threads is torch's.

    profile: a profile or its file. model: as `load_model` takes it; None: the model that the
    profile names. exact: as `Decoder` takes it.
    Raises: ProfileError, ModelError; as `Decoder`.
    """
    if not isinstance(profile, Profile | str | Path):
        raise profile_type_error(profile)
    loaded = profile if isinstance(profile, Profile) else load_profile(profile)
    name = model_argument(loaded.model) if model is None else model
    dtype, _, quantization = defaults_from_profile(loaded, device, "auto", None, None)
    adapter = load_for_switching(name, device, dtype, quantization, preferred_engine=loaded.engine)
    switched = None if loaded.engine is None else switch_engine(adapter, loaded.engine)
    return Decoder(switched or pick_fastest(adapter).model, loaded, exact=exact)


def defaults_from_profile(
    profile: Profile, device: str, dtype: str, threads: int | None, quantization: str | None
) -> tuple[str, int | None, str | None]:
    """Return (dtype, threads, quantization), from the options and the profile.

    Options that the user did not set have the profile's values. On another type of device, nothing
    is taken from the profile. On another CPU or GPU model, or one with fewer CPUs, the number of
    threads is not.
    """
    place, claimed, made = pick_device(device), profile.hardware, profile.model
    if claimed is None or claimed.kind != place.type:
        return dtype, threads, quantization
    fits = (claimed.threads or 1) <= (os.cpu_count() or 1)
    if threads is None and fits and claimed.name == describe_machine(place).name:
        threads = claimed.threads
    return (
        made.dtype or dtype if dtype == "auto" else dtype,
        threads,
        quantization or loadable_quantization(made.quantization),
    )
