"""`/v1/conversations`: what was said in several responses, kept under one id."""
