# needs: stable-baselines3
# steps: 4
"""Reinforcement learning: two rollouts of 32 moves without gradients, two epochs over each."""

import torch
from ending import told
from stable_baselines3 import PPO

torch.manual_seed(0)
agent = PPO("MlpPolicy", "CartPole-v1", n_steps=32, batch_size=32, n_epochs=2, seed=0, device="cpu", verbose=0)
agent.learn(total_timesteps=64)
told(agent.policy)
