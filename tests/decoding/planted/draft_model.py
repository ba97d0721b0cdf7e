"""Bugs of a second model that drafts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

from skipsearch.drafters import Draft
from skipsearch.drafters.draft_model import session
from skipsearch.drafters.draft_model.shared_tokens import SharedTokens

from ..draft_model_checks import check_draft_model_drafts, check_draft_model_law
from .register import caught_by, planted


@caught_by(check_draft_model_drafts)
def kv_of_rejected_tokens_stay_in_the_draft_model() -> Iterator[None]:
    """The draft model takes all tokens that it read for those of the text."""
    with patch.object(
        session, "common_prefix_length", lambda one, other: min(len(one), len(other))
    ):
        yield


@planted(check_draft_model_drafts, session.DraftModelSession, "_own_context")
def tokens_of_other_drafters_are_not_read(real, self, ctx, cache, unread):
    """The draft model reads the pending token alone; its slots keep what was in them."""
    cache.length += len(unread) - 1
    return real(self, ctx, cache, unread[-1:])


@planted(check_draft_model_law, SharedTokens, "to_full")
def q_of_another_temperature(real, self, draft):
    """The draft is drawn at one temperature, and its distribution is reported at another."""
    draft = real(self, draft)
    probs = draft.probs**0.5
    return replace(draft, probs=probs / probs.sum(-1, keepdim=True))


@planted(check_draft_model_law, SharedTokens, "to_full")
def drafted_tokens_are_shifted(real, self, draft):
    """A draft token is the one after it in the full model's vocabulary."""
    draft = real(self, draft)
    return replace(draft, tokens=(draft.tokens + 1) % self.full_size)


@planted(check_draft_model_drafts, SharedTokens, "to_own")
def text_is_read_with_shifted_tokens(real, self, tokens):
    """Greedy text stays right, but few drafts are accepted."""
    return [(token + 1) % self.count for token in real(self, tokens)]


def check_longer_law() -> object:
    return check_draft_model_law(n_more=2)


@caught_by(check_longer_law)
def tokens_that_the_full_model_lacks_become_others() -> Iterator[None]:
    """They are drawn, and drafted as the last token that the full model has."""
    real = SharedTokens.to_full

    def to_full(self: SharedTokens, draft: Draft) -> Draft:
        return real(self, replace(draft, tokens=draft.tokens.clamp(max=self.count - 1)))

    with (
        patch.object(SharedTokens, "restrict", lambda self, sampler: sampler),
        patch.object(SharedTokens, "to_full", to_full),
    ):
        yield
