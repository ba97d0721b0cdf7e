"""`skipsearch profile`: look at, check, compare, convert and fetch profiles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from skipsearch.cli.consoles import err, out, print_json
from skipsearch.cli.verify import verify
from skipsearch.errors import ProfileError

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Example: skipsearch profile show my-profile.yaml\n\nLook at, check, compare, convert, "
    "fetch and verify profiles.",
)

File = Annotated[Path, typer.Argument(metavar="FILE", help="A profile.")]
Json = Annotated[bool, typer.Option("--json", help="Print data only.")]


@app.command("list", short_help="Every profile in the folders that are searched.")
def list_command(
    profiles: Annotated[Path | None, typer.Option(help="A folder to search first.")] = None,
    as_json: Json = False,
) -> None:
    """Example: skipsearch profile list --profiles my-profiles

    List every profile in the folders that --profile auto searches: --profiles, those in
    SKIPSEARCH_PROFILE_PATH, ./profiles (where tune writes), the user folder, pulled repositories,
    and the profiles that come with skipsearch."""
    from skipsearch.profile.canonical import to_plain_data
    from skipsearch.profile.find import list_profiles
    from skipsearch.profile.show import describe_device, format_speedup

    listed = list(list_profiles(profiles))
    if as_json:
        print_json(
            [
                {
                    "file": str(entry.path),
                    "source": entry.source.label,
                    "fault": entry.error,
                    "profile": to_plain_data(entry.profile) if entry.profile else None,
                }
                for entry in listed
            ]
        )
        return
    for entry in listed:
        if entry.profile is None:
            with err.even_if_quiet():
                err.print(f"warning: {entry.error}", style="yellow")
            continue
        profile = entry.profile
        out.print(f"{entry.path}")  # on a line of its own, so that it can be copied
        out.print(
            f"    {profile.model.id}, {profile.task.name}: {profile.recipe.shape}, "
            f"{format_speedup(profile)}; {profile.model.dtype or 'any dtype'}; "
            f"device: {describe_device(profile)} ({entry.source.label})"
        )
    if not any(entry.profile for entry in listed):
        err.print(
            "no profiles yet; `skipsearch tune` makes one, `skipsearch profile pull` fetches some"
        )


@app.command(short_help="A profile in words, and its mask drawn.")
def show(file: File, as_json: Json = False) -> None:
    """Example: skipsearch profile show my-profile.yaml

    Describe a profile: its drafters, its mask and what was measured. --json prints its content.
    """
    from skipsearch.drafters.draft_model.other_engines import list_engine_commands
    from skipsearch.drafters.draft_model.spec import DraftModel
    from skipsearch.drafters.lookup.other_engines import list_engine_options
    from skipsearch.drafters.lookup.spec import Lookup
    from skipsearch.profile import load_profile
    from skipsearch.profile.canonical import to_plain_data
    from skipsearch.profile.show import describe_profile, draw_mask, explain_terms

    profile = load_profile(file)
    if as_json:
        print_json(to_plain_data(profile))
        return
    out.print(*describe_profile(profile), sep="\n")
    for line in explain_terms([str(profile.measured_recipe)]):
        out.print(line, style="dim")
    if profile.mask.n_skipped:
        out.print()
        out.print(draw_mask(profile.mask))
    lookup = next((d for d in profile.measured_recipe.drafters if isinstance(d, Lookup)), None)
    if lookup is not None:
        llama_cpp, vllm = list_engine_options(lookup)
        out.print()
        out.print(
            "The nearest lookup of other engines (no limit per matched token), not measured:",
            style="dim",
        )
        out.print(f"    llama-server -m MODEL.gguf {llama_cpp}")
        out.print(f"    vllm serve MODEL {vllm}")
    drafting = [d for d in profile.measured_recipe.drafters if isinstance(d, DraftModel)]
    if drafting:
        out.print()
        out.print(
            "The same draft model, whole, in other engines, whose speed was not measured:",
            style="dim",
        )
        for command in list_engine_commands(drafting[0]):
            out.print(f"    {command}")


@app.command(short_help="Check a profile, or every profile of a repository.")
def validate(
    paths: Annotated[
        list[Path], typer.Argument(metavar="FILE|DIR", help="Profiles, or folders of them.")
    ],
    as_json: Json = False,
) -> None:
    """Example: skipsearch profile validate profiles/

    Check that profiles load. In a folder called profiles, also check that the path of each profile
    fits its content. Each error gets one sentence; the exit status is 1 if there is any."""
    from skipsearch.profile.validate import validate_paths

    checked = validate_paths(paths)
    if as_json:
        print_json(
            [
                {"file": str(entry.path), "valid": entry.error is None, "fault": entry.error}
                for entry in checked
            ]
        )
    errors = [entry.error for entry in checked if entry.error]
    for error in errors:
        err.print(error)
    if errors:
        raise ProfileError(f"{len(errors)} of {len(checked)} profiles are not valid")
    if not as_json:
        out.print(f"{len(checked)} valid")


@app.command(short_help="Two profiles of one model side by side.")
def diff(
    a: Annotated[Path, typer.Argument(metavar="A")],
    b: Annotated[Path, typer.Argument(metavar="B")],
    as_json: Json = False,
) -> None:
    """Example: skipsearch profile diff old.yaml new.yaml

    Compare two profiles: sub-layers that only one of them skips, drafters and settings that differ,
    and whether the measured intervals overlap."""
    from skipsearch.profile import load_profile
    from skipsearch.profile.compare import compare_profiles

    difference = compare_profiles(load_profile(a), load_profile(b))
    if as_json:
        print_json(difference.as_dict())
    else:
        out.print(*difference.format_lines(), sep="\n")


@app.command("import", short_help="Turn a published file of skip sets into profiles.")
def import_command(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="skip_layers.json of Draft & Verify or SWIFT.")
    ],
    to: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="The folder that has or gets profiles/.")
    ],
) -> None:
    """Example: skipsearch profile import skip_layers.json --out my-profiles

    Turn a published file of skip sets into profiles with the verdict unmeasured: decoding with them
    is lossless, but their speed is unknown. An existing profile with other content is not replaced.
    """
    from skipsearch.profile import dump_profile, save_profile
    from skipsearch.profile.import_ import import_skip_sets
    from skipsearch.profile.load import read_file
    from skipsearch.profile.paths import profile_path

    imported = {to / profile_path(profile): profile for profile in import_skip_sets(file)}
    for path, profile in imported.items():
        if path.exists() and read_file(path) != dump_profile(profile).encode():
            raise ProfileError(
                f"{path} exists already and says something else: move it away, or choose another "
                "--out"
            )
    for path, profile in imported.items():
        save_profile(profile, path, replace=True)
        out.print(f"{path}")


@app.command(short_help="Fetch the profiles of a Git repository.")
def pull(
    address: Annotated[str, typer.Argument(metavar="URL[@REF]", help="https, ssh or file.")],
    signed: Annotated[
        bool,
        typer.Option(
            "--signed", help="Accept only a tag or commit whose signature git finds good."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Example: skipsearch profile pull https://github.com/org/profiles@main

    Fetch the profiles of a Git repository into the user folder, where --profile auto finds them.
    Only valid *.yaml files under profiles/ are kept; nothing in the repository is executed and no
    link is followed. The commit is stored next to them."""
    from skipsearch.profile.pull import pull_repository as pull_profiles

    pulled = pull_profiles(address, signed)
    for refusal in pulled.rejections:
        err.print(f"rejected: {refusal}", style="yellow")
    if as_json:
        print_json(
            {
                "url": pulled.url,
                "ref": pulled.ref,
                "commit": pulled.commit,
                "signature": pulled.signature,
                "folder": str(pulled.folder),
                "kept": [str(path) for path in pulled.accepted_files],
                "refused": list(pulled.rejections),
            }
        )
    else:
        count = (
            f"{len(pulled.accepted_files)} profile{'s' if len(pulled.accepted_files) > 1 else ''}"
        )
        good = f" (signature good: git {pulled.signature})" if pulled.signature else ""
        out.print(f"{count} from {pulled.url} at {pulled.commit[:12]}{good}, in {pulled.folder}")


app.command("verify", short_help="Measure a profile here: does its claim hold?")(verify)


@app.command(short_help="JSON Schema of a profile, for editors.")
def schema() -> None:
    """Example: skipsearch profile schema > profile.schema.json

    Print the JSON Schema of the current profile version, with which editors can complete and check
    YAML."""
    from skipsearch.profile.schema import json_schema

    typer.echo(json.dumps(json_schema(), indent=1, ensure_ascii=False))
