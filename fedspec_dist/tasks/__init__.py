"""What a loss is: loss, test metrics, and the curvature of the loss in the model's outputs.

A task sees outputs and targets only, never parameters. Nothing here imports another folder of the package.
"""
