// destination = source * scale, through fp32. -DSRC, -DDST: storage types.

extern "C" __global__ void scaled_cast(const SRC* source, DST* destination, int64 numel, const float* scale_at,
                                       float scale) {
  scale = scalar(scale_at, scale);
  bool fits = aligned(source) && aligned(destination);
  for (int64 i = first_index() * VECTOR; i < numel; i += index_stride() * VECTOR) {
    bool whole = fits && i + VECTOR <= numel;
    Vector<SRC> in = load(source, i, numel, whole);
    Vector<DST> result;
#pragma unroll
    for (int k = 0; k < VECTOR; ++k) result.at[k].store(in.at[k].load() * scale);
    store(destination, i, numel, whole, result);
  }
}
