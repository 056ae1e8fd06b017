"""The engine: scheduler, model runner, paged attention, sampler."""
