"""Verification of drafts against the target model's distributions, exact in distribution (specs 7.2).

| verifier | the drafter sends for each draft | drawn from | a rejection costs |
|---|---|---|---|
| agreement | the token | anything at all | nothing: the target's own token is known |
| rejection | the token and its draft probability | the draft distribution | a target distribution to the drafter |
| truncated | the token and its truncated distribution | that distribution | nothing |

*Agreement* samples the target's own token with noise that both sides have in common, and goes on as long as the draft
is that token: greedy matching is its case at temperature 0, and the text is the target model's own for the same seed.
*Rejection* (as in DSSD) and *truncated* (GELATO) are Leviathan et al. 2023, Algorithm 1: the text has the target's
distribution, but is another one for the same seed.

- `names`: the three
- `draft_dist`: the distribution that a draft is drawn from, on a grid that few bytes carry exactly
- `coins`: acceptance, and the recovered token of a rejected place
- `target_parts`: a target distribution as a head for the drafter, and a rest that stays

Distributions are final: after temperature, penalties, mask, top-k, top-p and min-p; their mass is what they keep, and
the rest is never drawn.
"""
