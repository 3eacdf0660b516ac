// One optimizer step over a flat shard in a single pass: unscale and clip (one multiplier), update, cast.
// -DGRAD: storage type of the gradient; -DOUT: of the 16-bit parameters, or NONE. Formulas: see step.py.

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
  Adam rule = adam_rule(scalar(step_at, step), scalar(lr_at, lr), scalar(multiplier_at, multiplier), log_beta1,
                        log_beta2, one_minus_beta1, one_minus_beta2, eps, weight_decay, decoupled);
  rule.master = master, rule.exp_avg = exp_avg, rule.exp_avg_sq = exp_avg_sq;
  run(rule, grad, out, numel);
}

extern "C" __global__ void sgd(float* master, float* momentum_buffer, const GRAD* grad, OUT* out, int64 numel,
                               const float* step_at, float step, const float* lr_at, float lr,
                               const float* multiplier_at, float multiplier, const float* found_inf_at,
                               float found_inf, float momentum, float one_minus_dampening, float weight_decay,
                               int64 nesterov) {
  if (scalar(found_inf_at, found_inf) != 0) return;
  Sgd rule = sgd_rule(scalar(step_at, step), scalar(lr_at, lr), scalar(multiplier_at, multiplier), momentum,
                      one_minus_dampening, weight_decay, nesterov);
  rule.master = master, rule.exp_avg = momentum_buffer;
  run(rule, grad, out, numel);
}

extern "C" __global__ void lion(float* master, float* exp_avg, const GRAD* grad, OUT* out, int64 numel,
                                const float* lr_at, float lr, const float* multiplier_at, float multiplier,
                                const float* found_inf_at, float found_inf, float one_minus_beta1,
                                float one_minus_beta2, float weight_decay) {
  if (scalar(found_inf_at, found_inf) != 0) return;
  Lion rule = lion_rule(scalar(lr_at, lr), scalar(multiplier_at, multiplier), one_minus_beta1, one_minus_beta2,
                        weight_decay);
  rule.master = master, rule.exp_avg = exp_avg;
  run(rule, grad, out, numel);
}
