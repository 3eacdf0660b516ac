// The rules of optimizers on registers, for the kernels of step.cu and narrow.cu. Formulas: see step.py.

struct Adam {
  float *master, *exp_avg, *exp_avg_sq;
  float multiplier, l2, decay, step_size, correction2_root, one_minus_beta1, one_minus_beta2, eps;

  // Works on registers: w, a and b are an element of master and of the two moments.
  __device__ void update(float g, float& w, float& a, float& b) const {
    g *= multiplier;
    if (l2 != 0) g += l2 * w;
    a += one_minus_beta1 * (g - a);
    b += one_minus_beta2 * (g * g - b);
    w = w * decay - step_size * a / (sqrtf(b) / correction2_root + eps);
  }
};

struct Sgd {
  float *master, *exp_avg, *exp_avg_sq;  // exp_avg: the momentum buffer, null without momentum
  float multiplier, weight_decay, lr, momentum, one_minus_dampening;
  bool nesterov, first;

  __device__ void update(float g, float& w, float& a, float&) const {
    g *= multiplier;
    if (weight_decay != 0) g += weight_decay * w;
    if (momentum != 0) {
      a = first ? g : momentum * a + one_minus_dampening * g;
      g = nesterov ? g + momentum * a : a;
    }
    w -= lr * g;
  }
};

struct Lion {
  float *master, *exp_avg, *exp_avg_sq;
  float multiplier, lr, weight_decay, one_minus_beta1, one_minus_beta2;

  __device__ void update(float g, float& w, float& a, float&) const {
    float change = g * multiplier - a;
    float c = a + one_minus_beta1 * change;
    w -= lr * ((float)((c > 0) - (c < 0)) + weight_decay * w);
    a += one_minus_beta2 * change;
  }
};

// Rules without tensors, from a step's numbers.
__device__ inline Adam adam_rule(float step, float lr, float multiplier, float log_beta1, float log_beta2,
                                 float one_minus_beta1, float one_minus_beta2, float eps, float weight_decay,
                                 int64 decoupled) {
  // expm1 because 1 - beta^step cancels in fp32
  float correction1 = -expm1f(step * log_beta1), correction2 = -expm1f(step * log_beta2);
  return {nullptr, nullptr, nullptr, multiplier, decoupled ? 0 : weight_decay, decoupled ? 1 - lr * weight_decay : 1,
          lr / correction1, sqrtf(correction2), one_minus_beta1, one_minus_beta2, eps};
}

__device__ inline Sgd sgd_rule(float step, float lr, float multiplier, float momentum, float one_minus_dampening,
                               float weight_decay, int64 nesterov) {
  return {nullptr, nullptr, nullptr, multiplier, weight_decay, lr, momentum, one_minus_dampening, nesterov != 0, step == 1};
}

__device__ inline Lion lion_rule(float lr, float multiplier, float one_minus_beta1, float one_minus_beta2,
                                 float weight_decay) {
  return {nullptr, nullptr, nullptr, multiplier, lr, weight_decay, one_minus_beta1, one_minus_beta2};
}

