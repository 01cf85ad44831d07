"""Parts of the benches about drafts: workloads, drafters, adversarial settings."""
