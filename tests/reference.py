"""Dense float64 twins of the numeric routines, written like the papers' pseudocode and sharing no code with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from math import cos, exp, log, pi

import torch
from torch import Tensor


def high_pass_matrix(d: int, ratio: float) -> Tensor:
    """`I - sum_{k < cut} c_k cos(2 pi k (i - j) / d)`, `[d, d]`: the identity less its low frequencies."""
    num_coefficients = d // 2 + 1
    cut = int(Fraction(str(ratio)) * num_coefficients)
    matrix = [[float(i == j) for j in range(d)] for i in range(d)]
    for k in range(cut):
        scale = 1 / d if 2 * k in (0, d) else 2 / d
        for i in range(d):
            for j in range(d):
                matrix[i][j] -= scale * cos(2 * pi * k * (i - j) / d)
    return torch.tensor(matrix, dtype=torch.float64)


def fedgh_vectors(updates: Tensor, mode: str) -> Tensor:
    """The harmonized updates `[K, P]`, by projecting the vectors themselves."""
    received = [update.clone() for update in updates.double()]
    running = [update.clone() for update in updates.double()]
    for i in range(len(running)):
        for j in range(i + 1, len(running)):
            source = running if mode == "pairwise" else received
            left, right = source[i].clone(), source[j].clone()
            if float(left @ right) < 0:
                if float(right @ right) >= 1e-24:
                    running[i] = running[i] - (running[i] @ right) / (right @ right) * right
                if float(left @ left) >= 1e-24:
                    running[j] = running[j] - (running[j] @ left) / (left @ left) * left
    return torch.stack(running)


def fipa_mean_fisher(
    bases: Sequence[Tensor], eigenvalues: Sequence[Tensor], updates: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """`Hbar [P, P]` and `b [P]`, both as sums over clients."""
    num_parameters = updates.shape[1]
    mean = torch.zeros(num_parameters, num_parameters, dtype=torch.float64)
    right = torch.zeros(num_parameters, dtype=torch.float64)
    for basis, values, update, weight in zip(bases, eigenvalues, updates, weights, strict=True):
        fisher = basis.double() @ torch.diag(values.double()) @ basis.double().T
        mean += weight.double() * fisher
        right += weight.double() * fisher @ update.double()
    return mean, right


def fipa_dense(
    bases: Sequence[Tensor], eigenvalues: Sequence[Tensor], updates: Tensor, weights: Tensor, damping: float
) -> Tensor:
    """`(Hbar + damping I)^-1 b`, or `Hbar^+ b` without damping."""
    mean, right = fipa_mean_fisher(bases, eigenvalues, updates, weights)
    if damping == 0:
        return torch.linalg.pinv(mean, rtol=1e-5, hermitian=True) @ right
    return torch.linalg.inv(mean + damping * torch.eye(len(mean), dtype=torch.float64)) @ right


def fipa_released(
    bases: Sequence[Tensor],
    eigenvalues: Sequence[Tensor],
    updates: Tensor,
    weights: Tensor,
    damping: float,
    step: float,
) -> Tensor:
    """The released program's merge, with its second term: `step (damping Q z + (b - Q Q^T b))`."""
    stacked = torch.cat([basis.double() for basis in bases], dim=1)
    importance = torch.cat([w.double() * v.double() for w, v in zip(weights, eigenvalues, strict=True)])
    q, r = torch.linalg.qr(stacked, mode="reduced")
    small = r @ torch.diag(importance) @ r.T
    small = (small + small.T) / 2
    right = torch.zeros(updates.shape[1], dtype=torch.float64)
    for basis, values, update, weight in zip(bases, eigenvalues, updates, weights, strict=True):
        right += weight.double() * basis.double() @ (values.double() * (basis.double().T @ update.double()))
    projected = q.T @ right
    z = torch.linalg.inv(small + damping * torch.eye(len(small), dtype=torch.float64)) @ projected
    return step * (damping * q @ z + (right - q @ projected))


def softmax_curvature(outputs: Tensor) -> Tensor:
    """`diag(p) - p p^T` for one row of logits `[C]`."""
    p = torch.exp(outputs) / torch.exp(outputs).sum()
    return torch.diag(p) - torch.outer(p, p)


def dense_fisher(
    forward: Callable[[Tensor, Tensor], Tensor],
    theta: Tensor,
    inputs: Tensor,
    curvature: Callable[[Tensor], Tensor],
) -> Tensor:
    """`(1/N) sum_n J_n^T S_n J_n`, `[P, P]`, one sample at a time."""
    total = torch.zeros(len(theta), len(theta), dtype=torch.float64)
    for n in range(len(inputs)):

        def outputs_at(parameters: Tensor, sample: Tensor = inputs[n : n + 1]) -> Tensor:
            return forward(parameters, sample)[0]

        jacobian = torch.autograd.functional.jacobian(outputs_at, theta)
        total += (jacobian.T @ curvature(outputs_at(theta).detach()) @ jacobian).double()
    return total / len(inputs)


class DenseRows:
    """The `RowMatrix` protocol on one dense tensor `[K, P]`, all columns on this process."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows.double()

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    def gram(self) -> Tensor:
        return self.rows @ self.rows.T

    def inner(self, other: DenseRows) -> Tensor:
        return self.rows @ other.rows.T

    def combine(self, coefficients: Tensor) -> Tensor:
        total = self.zeros()
        for coefficient, row in zip(coefficients, self.rows, strict=True):
            total += coefficient * row
        return total

    def dot(self, vector_slice: Tensor) -> Tensor:
        return self.rows @ vector_slice.double()

    def norms(self) -> Tensor:
        return self.rows.norm(dim=1)

    def qr_r(self) -> Tensor:
        return torch.linalg.qr(self.rows.T).R

    def combine_q(self, z: Tensor) -> Tensor:
        return torch.linalg.qr(self.rows.T).Q @ z

    def zeros(self) -> Tensor:
        return self.rows.new_zeros(self.rows.shape[1])


def sam_ascent(parameters: Tensor, gradient: Tensor, rho: float, scaled: Sequence[int], eta: float) -> Tensor:
    """`e [P]` of SAM, or of ASAM for the entries `scaled`, entry by entry."""
    scales = [abs(float(w)) + eta if i in scaled else 1.0 for i, w in enumerate(parameters)]
    norm = sum((t * float(g)) ** 2 for t, g in zip(scales, gradient, strict=True)) ** 0.5
    ascent = [rho * t * t * float(g) / norm for t, g in zip(scales, gradient, strict=True)]
    return torch.tensor(ascent, dtype=torch.float64)


def calibrated_cross_entropy(
    logits: Tensor, labels: Tensor, class_counts: Sequence[int], tau: float, with_own: bool = True
) -> float:
    """FedLC's loss, class by class; without the sample's own class in the denominator if not `with_own`."""
    total = 0.0
    for row, label in zip(logits.tolist(), labels.tolist(), strict=True):
        terms = {c: exp(z - tau * n**-0.25) for c, (z, n) in enumerate(zip(row, class_counts, strict=True)) if n > 0}
        others = sum(term for c, term in terms.items() if c != label)
        if with_own or others:
            total -= log(terms[label] / (others + with_own * terms[label]))
    return total / len(logits)


def feature_decorrelation(features: Tensor) -> float:
    """FedDecorr's second term: the features standardised one by one, then every pair of them."""
    num_samples, width = features.shape
    columns = []
    for column in features.T.tolist():
        mean = sum(column) / num_samples
        variance = sum((x - mean) ** 2 for x in column) / (num_samples - 1)
        columns.append([(x - mean) / (variance + 1e-8) ** 0.5 for x in column])
    products = [
        sum(x * y for x, y in zip(columns[i], columns[j], strict=True)) ** 2
        for i in range(width)
        for j in range(width)
        if i != j
    ]
    return sum(products) / len(products) / num_samples


def cosine_of(x: Sequence[float], y: Sequence[float]) -> float:
    inner = sum(a * b for a, b in zip(x, y, strict=True))
    return inner / (sum(a * a for a in x) * sum(b * b for b in y)) ** 0.5


def model_contrast(z: Tensor, z_global: Tensor, z_previous: Tensor, temperature: float) -> float:
    """MOON's second term, sample by sample."""
    total = 0.0
    for own, there, before in zip(z.tolist(), z_global.tolist(), z_previous.tolist(), strict=True):
        attraction, repulsion = exp(cosine_of(own, there) / temperature), exp(cosine_of(own, before) / temperature)
        total -= log(attraction / (attraction + repulsion))
    return total / len(z)


def relaxed_contrast(level: Tensor, labels: Tensor, temperature: float, threshold: float) -> tuple[float, float]:
    """FedRCL's two terms for one level `[B, C, H, W]` or `[B, d]`, from sorted lists of similarities."""
    images = level.reshape(*level.shape[:2], -1).tolist()
    features = [[sum(channel) / len(channel) for channel in image] for image in images]
    classes, contrasts, relaxations = labels.tolist(), [], []
    for i, anchor in enumerate(features):
        similarities = [cosine_of(anchor, other) for other in features]
        same = [s for j, s in enumerate(similarities) if classes[j] == classes[i]]
        different = sorted(s for j, s in enumerate(similarities) if classes[j] != classes[i])
        positive = exp(min(same) / temperature)
        contrasts.append(-log(positive / (positive + sum(exp(s / temperature) for s in different[-2:]))))
        least = min((s for j, s in enumerate(similarities) if classes[j] == classes[i] and j != i), default=-1.0)
        relaxations.append(log(1 + exp(((least if least >= threshold else -1.0) - 1) / temperature)))
    return sum(contrasts) / len(contrasts), sum(relaxations) / len(relaxations)
