"""How good is a mask, or a recipe?

Three answers, each more expensive and more reliable than the one before:

    replay       one parallel pass over text that the full model wrote says which of its tokens a mask's draft would have named
    simulate     walks over these positions under a recipe, and prices its rounds with the latency table: seconds a token, in milliseconds
    wall         real decoding, interleaved with plain decoding

For example: at 100 positions a mask names 70 of the next tokens, a draft pass costs β = 0.3 and a verify pass v = 1.1. Drafting one token a
round then yields 1.7 tokens for 1.4 plain passes, so decoding is predicted to be 1.21 times as fast.

prompts, continuations    what is decoded, and what the full model wrote           latency, table     what passes cost here
rounds, lookups, sweep    positions laid out for any policy; many at once          objectives         judging a mask in its best recipe
trained, chosen, at_once  trained drafts, masks chosen while decoding, S3D, as replay judges them
"""
