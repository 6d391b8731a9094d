"""A game with a leader and followers: the leader's best quantity, if it knows how the followers will answer.

Firms sell the same good at the price 12 − (all quantities). The leader chooses first; each follower then maximises its
own profit. So the followers' quantities are the weights, and the leader's is the hyperparameter. The derivative of
the leader's loss has a direct part, and an indirect part through the followers' answers.

    python examples/game.py
"""

import torch
from torch import Tensor, nn

import bestresponse as br

MARKET, COST = 12.0, 2.0


class Firms(nn.Module):
    """Quantities of firms; each has the same cost of a unit."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.quantities = nn.Parameter(torch.ones(number))


def follower_loss(followers: Firms, leader: Firms, batch: None) -> Tensor:
    """A loss whose gradient is that of each follower's own −profit in its own quantity.

    With linear demand such a potential exists: the firms play a potential game.
    """
    q, others = followers.quantities, leader.quantities.sum()
    return 0.5 * (q.sum().square() + q.square().sum()) + ((COST - MARKET + others) * q).sum()


def leader_loss(followers: Firms, leader: Firms, batch: None) -> Tensor:
    price = MARKET - followers.quantities.sum() - leader.quantities.sum()
    return -((price - COST) * leader.quantities).sum()


def main() -> None:
    torch.set_default_dtype(torch.float64)
    number = 3
    followers, leader = Firms(number), Firms(1)
    problem = br.Problem(followers, leader, follower_loss, leader_loss)
    tuner = br.Tuner(
        problem,
        torch.optim.SGD(followers.parameters(), 0.3),
        torch.optim.SGD(leader.parameters(), 0.5),
        br.Implicit(br.ConjugateGradient(5)),
        weight_steps=20,
    )
    tuner.fit([None], [None], hyper_steps=40)
    h = br.hypergradient(problem, None, None, br.Implicit(br.ConjugateGradient(5)))

    margin = MARKET - COST
    print(f"leader's quantity {float(leader.quantities.detach()):.6f}, closed form {margin / 2:.6f}")
    print(
        f"each follower's quantity {float(followers.quantities.mean().detach()):.6f}, "
        f"closed form {margin / 2 / (number + 1):.6f}"
    )
    profit, equal = -h.val_loss, (margin / (number + 2)) ** 2
    print(f"leader's profit {profit:.6f}, closed form {margin**2 / 4 / (number + 1):.6f}")
    print(f"its profit if all firms choose at the same time: {equal:.6f}")
    direct, indirect = (float(part["quantities"]) for part in (h.direct, h.indirect))
    print(f"derivative of its loss: direct {direct:.4f} and through the answers {indirect:.4f}")


if __name__ == "__main__":
    main()
