"""Forms of strategies as papers describe them: subclasses of the served machines, and arguments for them.

lookup     DIAA's parts: fixed budgets, static trees, the paper's scores, drafters without one of their features
flowspec   `pipeline` as naive, pruned and PipeDec's tree speculation
dragon     shapes of `aggregate`'s drafts: DRAGON's chains and whole sequences; its model of the time per token
"""
