import torch

torch.manual_seed(0)
inputs = torch.randn(6400, 64)
data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
model = torch.nn.Sequential(torch.nn.Linear(64, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)

for step, (x, y) in enumerate(loader):
    loss = (model(x) - y).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 40 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
