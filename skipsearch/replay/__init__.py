"""Judge a recipe from recorded text, without decoding with it.

replay        one parallel pass over text that the full model wrote: which tokens a draft gets right
rounds        these positions laid out for any draft policy
simulate      walk the rounds of one recipe, and predict its decode time from the latency table
sweep         the same for many draft policies at once
workload      tokenised prompts, and how to generate from them
evidence      what searchers get before a search
reliability   acceptance by what a drafter knows beforehand

For example: at 100 positions a mask gets 70 of the next tokens right, a draft pass costs β = 0.3
and a verify pass v = 1.1. Drafting one token a round then yields 1.7 tokens for 1.4 plain passes,
so decoding is predicted to be 1.21 times as fast.

generate_together writes the text. replay_batches and recurrent_batches hold it with its K/V.
lookup_replay, trained_replay and parallel_draft replay lookups, trained drafts and S3D.
"""
