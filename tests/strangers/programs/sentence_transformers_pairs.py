# needs: sentence-transformers
# steps: 3
"""Sentence embeddings from a small random BERT, trained on pairs."""

import torch
from ending import told
from sentence_transformers import SentenceTransformer, losses, models
from torch import nn
from transformers import BertConfig, BertModel

torch.manual_seed(0)


class Words(nn.Module):
    """Tokens are given; no vocabulary has to be fetched."""

    def __init__(self):
        super().__init__()
        self.bert = BertModel(
            BertConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
        )

    def forward(self, features):
        out = self.bert(input_ids=features["input_ids"], attention_mask=features["attention_mask"])
        return {**features, "token_embeddings": out.last_hidden_state}

    def save(self, *_, **__): ...


model = SentenceTransformer(
    modules=[Words(), models.Pooling(32, pooling_mode="mean"), models.Normalize()], device="cpu"
)
goal = losses.MultipleNegativesRankingLoss(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model.train()
found = []
for _ in range(3):
    pair = [
        {"input_ids": torch.randint(0, 100, (4, 7)), "attention_mask": torch.ones(4, 7, dtype=torch.long)}
        for _ in range(2)
    ]
    loss = goal(pair, None)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    found.append(loss.item())
told(found, model)
