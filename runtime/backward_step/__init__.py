"""Steps each unit inside the backward pass, so that no rank has gradients of the whole model."""
