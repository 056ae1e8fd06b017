"""Which replica runs each stage of a request: cost model, placement policy, admission."""
