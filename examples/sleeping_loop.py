"""Train by reward with the GPU lent to generation between steps: python examples/sleeping_loop.py

Needs no GPU and no network; with a GPU the model goes there. A tiny network is rewarded for tokens that climb by one.
Twice it generates: first with the weights that are trained, for which state and gradients sleep, then with copies of
them, as an inference engine has, for which everything sleeps.
"""

import copy

import torch

import hostward

VOCABULARY, LENGTH, SAMPLES = 16, 6, 64


class Policy(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, 64)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(3))
        self.head = torch.nn.Linear(64, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


@torch.no_grad()
def generate(policy: torch.nn.Module) -> torch.Tensor:
    tokens = torch.randint(VOCABULARY, (SAMPLES, 1), device=device)
    for _ in range(LENGTH):
        next_token = torch.multinomial(policy(tokens[:, -1]).softmax(-1), 1)
        tokens = torch.cat([tokens, next_token], dim=1)
    return tokens


def train(tokens: torch.Tensor) -> float:
    """One policy-gradient step in two microbatches; returns the share of rewarded tokens."""
    reward = (tokens[:, 1:] == (tokens[:, :-1] + 1) % VOCABULARY).float()
    advantage = reward - reward.mean()
    for i, part in enumerate(torch.arange(SAMPLES, device=device).chunk(2)):
        with optimizer.accumulate(last=i == 1):
            chosen = policy(tokens[part, :-1]).log_softmax(-1).gather(-1, tokens[part, 1:, None])[..., 0]
            (-(chosen * advantage[part]).mean() / 2).backward()
    optimizer.step()
    optimizer.zero_grad()
    return reward.mean().item()


torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
policy = Policy().to(device)
optimizer = hostward.AdamW(policy, lr=1e-2, max_grad_norm=1.0, offload_fraction=0.5)
rewards = []

for _ in range(40):
    report = optimizer.sleep(("state", "gradients"))  # the weights stay: they generate
    tokens = generate(policy)
    optimizer.wake()
    rewards.append(train(tokens))

for _ in range(40):
    engine = copy.deepcopy(policy)  # weight sync, before the weights sleep
    report = optimizer.sleep()
    tokens = generate(engine)
    del engine  # its memory goes before training's comes back
    optimizer.wake()
    rewards.append(train(tokens))

print(report.explain())
print(f"rewarded tokens: {rewards[0]:.0%} at first, {rewards[-1]:.0%} in the end")
