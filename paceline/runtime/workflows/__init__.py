"""Workflows of agents, served: launches of the scheduler of `paceline.workflow` on a node's engine, threads and link.

run         one workflow as a generation
driver      carries out launches, and tells the scheduler how they end
agent_text  texts of agents, taken part by part, here or by the cloud's model
lookup      searching, reranking, refining and reading for one question
long        passages that are read one by one, and summaries
web         searches of the web, and its pages
"""
