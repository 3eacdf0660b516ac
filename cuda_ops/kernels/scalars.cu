// What is decided once a step, by one thread, so that the host need not wait for it.

// result: norm, multiplier, found_inf. Formulas: see prepare_step in norm.py.
extern "C" __global__ void prepare(const double* sum_squares, const float* divisor_at, float divisor, float clip,
                                   float* result) {
  if (first_index() != 0) return;
  divisor = scalar(divisor_at, divisor);
  float norm = (float)(sqrt(*sum_squares) / divisor);
  float ratio = clip > 0 ? fminf(clip / (norm + 1e-6f), 1.0f) : 1.0f;  // fminf: 1 where the norm is NaN
  result[0] = norm;
  result[1] = ratio / divisor;
  result[2] = norm - norm == 0 ? 0.0f : 1.0f;  // inf and NaN give NaN
}

// state: see LossScaleState in loss_scale.py. The rules are those of LossScaler in runtime/precision/loss_scaler.py; where
// that raises, nothing changes but the flag.
extern "C" __global__ void update_loss_scale(double* state, const float* found_inf_at, float found_inf) {
  if (first_index() != 0) return;
  double &scale = state[0], &left = state[1], &steps = state[2], &last_overflow = state[3], &at_floor = state[4];
  double window = state[5], min_scale = state[6], hysteresis = state[7];
  bool consecutive = state[8] != 0;
  if (scalar(found_inf_at, found_inf) != 0) {
    if (left > 1) {
      left -= 1;
    } else if (scale <= min_scale) {
      at_floor = 1;
      return;
    } else {
      scale = fmax(scale / 2, min_scale);
    }
    last_overflow = steps;
  } else {
    double since = steps - last_overflow - 1;
    bool grow = since > 0 && fmod(since, window) == 0;
    if (grow || consecutive) left = hysteresis;
    if (grow) scale *= 2;
  }
  steps += 1;
}
