"""Fisher matrices of a client's data as linear operators, and their leading eigenpairs.

The Fisher matrix is the one under the model's own distribution, equal to the generalised Gauss-Newton matrix; neither
the empirical Fisher nor the Hessian. Nothing here knows a task, a client or a rank: the task gives two callables, the
model a functional forward.
"""
