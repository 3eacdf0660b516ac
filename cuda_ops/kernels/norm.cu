// The sum of a tensor's squares, in two steps whose order depends on nothing but the length. -DSRC: storage type.

// fp32 products, as many to a thread as the grid leaves, then fp64: inf and NaN come out as what they are.
extern "C" __global__ void square_sums(const SRC* source, int64 numel, double* sums) {
  bool fits = aligned(source);
  double sum = 0;
  for (int64 i = first_index() * VECTOR; i < numel; i += index_stride() * VECTOR) {
    Vector<SRC> values = load(source, i, numel, fits && i + VECTOR <= numel);
    float part = 0;
#pragma unroll
    for (int k = 0; k < VECTOR; ++k) part += values.at[k].load() * values.at[k].load();
    sum += part;
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

// One block. Not finite if any part is not.
extern "C" __global__ void total(const double* sums, int64 count, double* result) {
  double sum = 0;
  for (int64 i = threadIdx.x; i < count; i += THREADS) sum += sums[i];
  sum = block_sum(sum);
  if (threadIdx.x == 0) *result = sum;
}
