"""Research beside the product, outside the wheel: what papers, benches and training need and no user carries.

simulation     hosts, network and answers in virtual time, driving the machines that serve
training       of the demonstration's models
demo_pair      their answers, side by side and together
link_document  the generator of openapi/link.md
"""
