import torch

import zlaunch

torch.manual_seed(0)
inputs = torch.randn(6400, 64)
data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
model = torch.nn.Sequential(torch.nn.Linear(64, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
config = {"train_micro_batch_size_per_gpu": 16, "zero_optimization": {"stage": 3}}
model, optimizer, loader, _ = zlaunch.initialize(None, model, optimizer, training_data=data, config=config)

for step, (x, y) in enumerate(loader):
    x, y = x.to(model.device), y.to(model.device)
    loss = (model(x) - y).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 40 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
