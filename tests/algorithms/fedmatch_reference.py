"""FedMatch, labels at client, on a linear softmax model in float64 NumPy, from its formulas."""

import collections
import dataclasses

import numpy as np
from numpy_reference import CLASSES, flat, softmax
from scipy import spatial


@dataclasses.dataclass
class Reference:
    """All rounds of a run; field names as in `FedMatchConfig`.

    `round` is called with `{client number: (labelled batches, unlabelled batches)}`. `image` is the
    fixed image, and `augment` takes a batch and the number of the step.
    """

    theta: list
    image: np.ndarray
    lr: float = 0.3
    momentum: float = 0.0
    lambda_s: float = 10.0
    lambda_i: float = 1e-2
    lambda_a: float = 1e-2
    lambda_l2: float = 10.0
    lambda_l1: float = 1e-4
    threshold: float = 0.85
    num_helpers: int = 2
    h_interval: int = 10
    helpers_at_refresh_only: bool = False
    consistency_on: str = "all"
    psi_factor: float = 0.2
    augment: object = None
    help_nobody: bool = False

    def __post_init__(self):
        self.sigma = [w / (1 + self.psi_factor) for w in self.theta]
        self.psi = [self.psi_factor * s for s in self.sigma]
        self.done = 0
        self.kept_by_server = collections.defaultdict(list)  # client -> [(round, psi, answer)]

    def round(self, cohort, hidden_class=0):
        """Moves sigma and psi; returns the metrics of the round."""
        totals, results, rejected = collections.Counter(), {}, 0
        for number, (labeled, unlabeled) in cohort.items():
            helpers = [] if self.help_nobody else self.helpers_of(number)
            counts = collections.Counter(clients=1, helpers=len(helpers))
            sigma, psi = self.client(labeled, unlabeled, helpers, counts, hidden_class)
            if not all(np.isfinite(w).all() for w in (*sigma, *psi)):
                rejected += 1
                continue
            totals.update(counts)
            if counts["used"]:
                results[number] = sigma, psi
        for number, (sigma, psi) in results.items():
            logits = flat(self.image) @ (sigma[0] + psi[0]) + sigma[1] + psi[1]
            self.kept_by_server[number].append((self.done, psi, softmax(logits)[0]))
        if results:
            self.sigma = [np.mean([s[i] for s, _ in results.values()], axis=0) for i in range(2)]
            self.psi = [np.mean([p[i] for _, p in results.values()], axis=0) for i in range(2)]
            self.theta = [s + p for s, p in zip(self.sigma, self.psi, strict=True)]
        self.done += 1
        of = totals.__getitem__
        return {
            "labeled_loss": ratio(of("labeled_loss"), of("labeled")),
            "unlabeled_loss": ratio(of("unlabeled_loss"), of("unlabeled")),
            "kept_fraction": ratio(of("kept"), of("unlabeled")),
            "agreement_fraction": ratio(of("agreements"), of("votes")),
            "pseudo_label_accuracy": ratio(of("right"), of("kept")),
            "helpers_per_client": ratio(of("helpers"), of("clients")),
            "helper_bytes": of("helpers") * 4 * sum(w.size for w in self.psi),
            "images_used": of("used"),
            "rejected_clients": rejected,
        }

    def helpers_of(self, client):
        """The psi of the nearest others, by a KD-tree over what the server had at the refresh."""
        past = [r for r in range(self.done + 1) if (r + 1) % self.h_interval == 0]
        if not past or (self.helpers_at_refresh_only and past[-1] != self.done):
            return []
        seen = {
            number: [entry for entry in entries if entry[0] < past[-1]]
            for number, entries in self.kept_by_server.items()
        }
        seen = {number: entries[-1] for number, entries in seen.items() if entries}
        if client not in seen:
            return []
        numbers = list(seen)
        tree = spatial.KDTree([seen[number][2] for number in numbers])
        _, nearest = tree.query(seen[client][2], min(self.num_helpers + 1, len(numbers)))
        others = [numbers[i] for i in np.atleast_1d(nearest) if numbers[i] != client]
        return [seen[number][1] for number in others[: self.num_helpers]]

    def client(self, labeled, unlabeled, helpers, counts, hidden_class):
        sigma, psi = [w.copy() for w in self.sigma], [w.copy() for w in self.psi]
        helpers = [[s + p for s, p in zip(self.sigma, h, strict=True)] for h in helpers]
        velocities = [[np.zeros_like(w) for w in self.sigma] for _ in range(2)]
        for step in range(max(len(labeled), len(unlabeled))):
            if step < len(labeled):
                x, y = labeled[step]
                f, theta = flat(x), [s + p for s, p in zip(sigma, psi, strict=True)]
                probabilities = softmax(f @ theta[0] + theta[1])
                counts["labeled_loss"] -= np.log(probabilities[np.arange(len(y)), y]).sum()
                counts["labeled"] += len(y)
                error = self.lambda_s * (probabilities - np.eye(CLASSES)[y]) / len(y)
                self.move(sigma, velocities[0], [f.T @ error, error.sum(axis=0)])
            if step < len(unlabeled):
                gradients = self.unlabeled(
                    sigma, psi, helpers, unlabeled[step], step, counts, hidden_class
                )
                self.move(psi, velocities[1], gradients)
        counts["used"] = counts["labeled"] + counts["unlabeled"]
        return sigma, psi

    def unlabeled(self, sigma, psi, helpers, x, step, counts, hidden_class):
        """The gradient of L_u(psi)."""
        theta = [s + p for s, p in zip(sigma, psi, strict=True)]
        strong = x if self.augment is None else self.augment(x, step)
        own = softmax(flat(x) @ theta[0] + theta[1])
        others = [softmax(flat(x) @ h[0] + h[1]) for h in helpers]
        kept = [i for i in range(len(x)) if own[i].max() >= self.threshold]
        counted = kept if self.consistency_on == "kept" else range(len(x))
        cross = consistency = 0.0
        gradients = [np.zeros_like(w) for w in psi]

        def add(features, d_logits):
            gradients[0] += np.outer(features, d_logits)
            gradients[1] += d_logits

        for i in range(len(x)):
            votes = [np.argmax(p[i]) for p in (own, *others)]
            label = np.argmax(np.bincount(votes, minlength=CLASSES))
            counts["agreements"] += sum(vote == votes[0] for vote in votes[1:])
            if i in kept:
                counts["right"] += label == hidden_class
                f = flat(strong[i : i + 1])[0]
                p = softmax(f @ theta[0] + theta[1])
                cross -= np.log(p[label]) / len(kept)
                add(f, self.lambda_a * (p - np.eye(CLASSES)[label]) / len(kept))
            if i in counted:
                for other in others:
                    share = 1 / len(others) / len(counted)
                    consistency += share * np.sum(other[i] * np.log(other[i] / own[i]))
                    add(flat(x)[i], self.lambda_i * share * (own[i] - other[i]))
        loss = self.lambda_a * cross + self.lambda_i * consistency
        counts["unlabeled_loss"] += len(x) * loss
        counts["unlabeled"] += len(x)
        counts["votes"] += len(x) * len(others)
        counts["kept"] += len(kept)
        return [
            g + 2 * self.lambda_l2 * (p - s) + self.lambda_l1 * np.sign(p)
            for g, s, p in zip(gradients, sigma, psi, strict=True)
        ]

    def move(self, weights, velocity, gradients):
        for i, gradient in enumerate(gradients):
            velocity[i] = self.momentum * velocity[i] + gradient
            weights[i] = weights[i] - self.lr * velocity[i]


def ratio(a, b):
    return a / b if b else 0.0
