"""Judge a recipe from recorded text, without decoding with it.

replay        one parallel pass over text that the full model wrote: which tokens a draft gets right
rounds        a table of the positions of this text; any draft policy can be simulated on it
simulate      simulate the rounds of one recipe; predict its decode time from the latency table
sweep         predict the decode times of many draft policies at once
workload      tokenised prompts with their generation settings
evidence      measurements that searchers get before a search
reliability   acceptance by match length or confidence

For example: at 100 positions a mask gets 70 of the next tokens right, a draft pass costs β = 0.3
and a verify pass v = 1.1. Drafting one token a round then yields 1.7 tokens in the time of 1.4
plain passes, so decoding is predicted to be 1.21 times as fast.

generate_together generates the text. replay_batches and recurrent_batches hold the text with its
K/V. lookup_replay, trained_replay and parallel_draft replay lookups, trained drafts and S3D.
"""
