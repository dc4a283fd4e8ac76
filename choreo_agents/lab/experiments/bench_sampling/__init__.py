"""`choreo bench sampling`: what choosing the tokens of a step costs, in softmaxes over its logits."""
