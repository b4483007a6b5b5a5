"""The example's app with a reporter around it."""
