"""Measure time: draft and verify passes, and whole generations in turn.

latency        times of passes at one context length
latency_table  these times, cached for each machine
interleaved    generations of several decoders in turn, and successive halving
"""
