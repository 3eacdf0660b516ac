// One optimizer step over a flat shard in a single pass: unscale and clip (one multiplier), update, cast.
// -DGRAD: storage type of the gradient; -DOUT: of the 16-bit parameters, or NONE. Formulas: see step.py.

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

template <typename Rule> __device__ void run(const Rule& rule, const GRAD* grad, OUT* out, int64 numel) {
  bool fits = aligned(rule.master) && aligned(rule.exp_avg) && aligned(rule.exp_avg_sq) && aligned(grad) &&
              aligned(out);
  for (int64 i = first_index() * VECTOR; i < numel; i += index_stride() * VECTOR) {
    bool whole = fits && i + VECTOR <= numel;
    Vector<float> w = load(rule.master, i, numel, whole);
    Vector<float> a = load(rule.exp_avg, i, numel, whole);
    Vector<float> b = load(rule.exp_avg_sq, i, numel, whole);
    Vector<GRAD> g = load(grad, i, numel, whole);
    Vector<OUT> result;
#pragma unroll
    for (int k = 0; k < VECTOR; ++k) {
      rule.update(g.at[k].load(), w.at[k], a.at[k], b.at[k]);
      result.at[k].store(w.at[k]);
    }
    store(rule.master, i, numel, whole, w);
    store(rule.exp_avg, i, numel, whole, a);
    store(rule.exp_avg_sq, i, numel, whole, b);
    store(out, i, numel, whole, result);
  }
}

// Each scalar is a pointer and the value that counts where that is null.
extern "C" __global__ void adam(float* master, float* exp_avg, float* exp_avg_sq, const GRAD* grad, OUT* out,
                                int64 numel, const float* step_at, float step, const float* lr_at, float lr,
                                const float* multiplier_at, float multiplier, const float* found_inf_at,
                                float found_inf, float log_beta1, float log_beta2, float one_minus_beta1,
                                float one_minus_beta2, float eps, float weight_decay, int64 decoupled) {
  if (scalar(found_inf_at, found_inf) != 0) return;
  step = scalar(step_at, step);
  lr = scalar(lr_at, lr);
  // expm1 because 1 - beta^step cancels in fp32
  float correction1 = -expm1f(step * log_beta1), correction2 = -expm1f(step * log_beta2);
  Adam rule = {master, exp_avg, exp_avg_sq, scalar(multiplier_at, multiplier), decoupled ? 0 : weight_decay,
               decoupled ? 1 - lr * weight_decay : 1, lr / correction1, sqrtf(correction2),
               one_minus_beta1, one_minus_beta2, eps};
  run(rule, grad, out, numel);
}

extern "C" __global__ void sgd(float* master, float* momentum_buffer, const GRAD* grad, OUT* out, int64 numel,
                               const float* step_at, float step, const float* lr_at, float lr,
                               const float* multiplier_at, float multiplier, const float* found_inf_at,
                               float found_inf, float momentum, float one_minus_dampening, float weight_decay,
                               int64 nesterov) {
  if (scalar(found_inf_at, found_inf) != 0) return;
  Sgd rule = {master, momentum_buffer, nullptr, scalar(multiplier_at, multiplier), weight_decay, scalar(lr_at, lr),
              momentum, one_minus_dampening, nesterov != 0, scalar(step_at, step) == 1};
  run(rule, grad, out, numel);
}

extern "C" __global__ void lion(float* master, float* exp_avg, const GRAD* grad, OUT* out, int64 numel,
                                const float* lr_at, float lr, const float* multiplier_at, float multiplier,
                                const float* found_inf_at, float found_inf, float one_minus_beta1,
                                float one_minus_beta2, float weight_decay) {
  if (scalar(found_inf_at, found_inf) != 0) return;
  Lion rule = {master, exp_avg, nullptr, scalar(multiplier_at, multiplier), scalar(lr_at, lr), weight_decay,
               one_minus_beta1, one_minus_beta2};
  run(rule, grad, out, numel);
}
