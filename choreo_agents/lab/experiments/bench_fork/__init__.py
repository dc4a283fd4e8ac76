"""A fork with other system prompts, beside what prefix caches do."""
