"""How many greedy tokens drafting changes in half precision, with `exact` and without it, and what `exact` costs.

Every prompt is continued four times, by turns: plainly and with drafts, in passes of one fixed shape and in passes as they come. With
`exact` no token may differ. Without it some should, or the run was too short to prove anything.

    python tests/benchmarks/exact.py --tokens 10000
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from options import loaded, options

from skipsearch.decoding import Decoder
from skipsearch.evaluation.prompts import workload
from skipsearch.exits import DraftPolicy
from skipsearch.mask import SkipMask
from skipsearch.stats import DecodeStats
from skipsearch.tasks import load_task


@dataclass
class Way:
    """exact: in passes of one shape. drafts: with a draft model, or plainly."""

    exact: bool
    drafts: bool
    decoder: Decoder
    stats: DecodeStats = field(default_factory=DecodeStats)


def main() -> None:
    parser = options(__doc__, dtype="bfloat16", engine="auto")
    parser.add_argument("--tokens", type=int, default=10_000, help="of each way, at least")
    parser.add_argument("--length", type=int, default=256, help="tokens of a prompt, loops included")
    parser.add_argument("--draft-length", type=int, default=6)
    args = parser.parse_args()
    model = loaded(args)
    task = load_task(args.task)
    prompts = workload(model, task, task.calibration).prompts
    thirds = tuple(range(model.spec.n_layers // 3, model.spec.n_layers, 3))
    mask, policy = SkipMask(model.spec.n_layers, thirds, thirds), DraftPolicy(args.draft_length)
    ways = [Way(exact, drafts, Decoder(model, mask, draft_length=policy.draft_length, exit_policy=policy.exit, exact=exact) if drafts
                else Decoder(model, exact=exact)) for exact in (True, False) for drafts in (False, True)]
    differing = {True: 0, False: 0}  # prompts whose tokens drafts changed, with and without `exact`
    for i, prompt in enumerate(prompts):
        tokens = {}
        for way in ways[i % 4:] + ways[:i % 4]:
            generation = way.decoder.generate(prompt, args.length)
            tokens[way.exact, way.drafts] = generation.tokens
            way.stats += generation.stats
        for exact in differing:
            differing[exact] += tokens[exact, True] != tokens[exact, False]
        if min(way.stats.tokens for way in ways) >= args.tokens:
            break
    else:
        sys.exit(f"{task.name} has only {len(prompts)} prompts, which came to {ways[0].stats.tokens} tokens: give a greater --length")
    print(f"{args.model}, {args.dtype}, engine {model.spec.engine}: {i + 1} prompts, {mask.n_skipped} of {2 * mask.n_layers} "
          f"sub-layers skipped, {policy.draft_length} drafted a round")
    for plain, drafted in (ways[:2], ways[2:]):
        print(f"  {'exact' if plain.exact else 'as they come':12} {plain.stats.tokens} tokens, {differing[plain.exact]} of {i + 1} prompts "
              f"differ with drafts; {drafted.stats.accepted} drafts accepted, {drafted.stats.rejecting_rounds} rounds rejected")
    print(f"  plain decoding with exact takes {ways[0].stats.decode_seconds / ways[2].stats.decode_seconds:.3f} times as long")


if __name__ == "__main__":
    main()
