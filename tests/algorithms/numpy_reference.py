"""FedLabel on a linear softmax model in float64 NumPy, written from the paper's equations."""

import dataclasses

import numpy as np

CLASSES = 3
SHAPE = (2, 2, 1)
FEATURES = 4


@dataclasses.dataclass
class Reference:
    """Algorithm 1 for a linear softmax model; field names as in `FedLabelConfig`.

    `augment` is called with a batch and the number of the step.
    """

    lr: float = 0.3
    lr_momentum: float = 0.0
    threshold: float = 0.5
    consistency_weight: float = 1.0
    confidence: str = "variance"
    confidence_input: str = "probabilities"
    selection: str = "adaptive"
    proximal_strength: float = 0.0
    augment: object = None
    pseudo_label_view: str = "original"
    consistency_view: str = "original"

    def client(self, weights, labeled, unlabeled):
        """Returns delta_k, r_k and counts for lists of batches (x, y) and x."""
        weights = [np.asarray(w, np.float64) for w in weights]
        local = [w.copy() for w in weights]
        velocity = [np.zeros_like(w) for w in weights]
        used = 0
        for x, y in labeled:
            features = flat(x)
            error = softmax(features @ local[0] + local[1]) - np.eye(CLASSES)[y]
            gradients = [features.T @ error / len(y), error.mean(axis=0)]
            gradients = [
                g + self.proximal_strength * (w - w0)
                for g, w, w0 in zip(gradients, local, weights, strict=True)
            ]
            local, velocity = self.step(local, velocity, gradients)
            used += len(y)

        student = [w.copy() for w in weights]
        velocity = [np.zeros_like(w) for w in weights]
        kept_total = 0
        for step, x in enumerate(unlabeled):
            strong = x if self.augment is None else self.augment(x, step)
            view = strong if self.pseudo_label_view == "augmented" else x
            consistency = strong if self.consistency_view == "augmented" else x
            expert_logits = [flat(view) @ w[0] + w[1] for w in (weights, local)]
            gradients = [np.zeros_like(w) for w in weights]
            for i in range(len(x)):
                labels, mask, discarded, ratio = self.choose(*(e[i] for e in expert_logits))
                if not mask:
                    continue
                kept_total += 1
                f = flat(strong[i : i + 1])
                error = softmax(f @ student[0] + student[1]) - np.eye(CLASSES)[labels]
                gradients[0] += f.T @ error / len(x)
                gradients[1] += error[0] / len(x)
                if np.argmax(discarded) == labels:
                    f = flat(consistency[i : i + 1])
                    p, q = softmax(f @ student[0] + student[1])[0], softmax(discarded)
                    log_ratio = np.log(p) - np.log(q)
                    d_logits = p * (log_ratio - np.sum(p * log_ratio))
                    d_logits *= self.consistency_weight * ratio
                    gradients[0] += np.outer(f[0], d_logits) / len(x)
                    gradients[1] += d_logits / len(x)
            student, velocity = self.step(student, velocity, gradients)
        delta = [a + b - 2 * w for a, b, w in zip(local, student, weights, strict=True)]
        return delta, used + kept_total

    def step(self, weights, velocity, gradients):
        velocity = [self.lr_momentum * v + g for v, g in zip(velocity, gradients, strict=True)]
        return [w - self.lr * v for w, v in zip(weights, velocity, strict=True)], velocity

    def choose(self, global_logits, local_logits):
        """Eqs. pseul0, pseul and the ratio of eq. loc-glob2 for one image."""
        h_global, h_local = self.h(global_logits), self.h(local_logits)
        use_local = {"adaptive": h_local >= h_global, "local": True, "global": False}[
            self.selection
        ]
        if use_local:
            chosen, other, h_chosen, h_other = local_logits, global_logits, h_local, h_global
        else:
            chosen, other, h_chosen, h_other = global_logits, local_logits, h_global, h_local
        ratio = 0.0 if h_chosen == 0 else min(1.0, h_other / h_chosen)
        return np.argmax(chosen), softmax(chosen).max() > self.threshold, other, ratio

    def h(self, logits):
        scores = softmax(logits) if self.confidence_input == "probabilities" else logits
        if self.confidence == "variance":
            return np.var(scores)
        return 1 + np.sum(scores * np.log(scores)) / np.log(CLASSES)

    def round(self, weights, clients):
        """One round of the server on `(labeled, unlabeled)` pairs; returns weights and the r_k."""
        outputs = [self.client(weights, *client) for client in clients]
        total = sum(r for _, r in outputs)
        if total == 0:
            return weights, [0]
        new = [w + sum(r * delta[i] for delta, r in outputs) / total for i, w in enumerate(weights)]
        return new, [r for _, r in outputs]


def flat(x):
    return np.asarray(x, np.float64).reshape(len(x), FEATURES)


def softmax(logits):
    e = np.exp(logits - np.max(logits, axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)
