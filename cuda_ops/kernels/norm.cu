// The sums of tensors' squares, in two steps whose order depends on nothing but a tensor's length.
// -DSRC: storage type.

// table: a row for each tensor with its address, its elements and the first of its blocks; a last row has the number
// of all blocks. Without a table there is one tensor, which the other arguments give.
const int ROW = 3;
const int WIDE = 16 / sizeof(SRC);

struct Part {
  const SRC* source;
  int64 numel, first, stop;  // blocks first to stop - 1 work on it
};

__device__ inline Part part_of_this_block(const int64* table, int64 rows, const SRC* source, int64 numel) {
  if (!table) return {source, numel, 0, gridDim.x};
  int64 low = 0, high = rows;
  while (high - low > 1) {
    int64 middle = (low + high) / 2;
    if (table[ROW * middle + 2] <= blockIdx.x) low = middle;
    else high = middle;
  }
  const int64* row = table + ROW * low;
  return {(const SRC*)row[0], row[1], row[2], row[ROW + 2]};
}

// fp32 products, 16 bytes at a time, then fp64: inf and NaN come out as what they are.
extern "C" __global__ void square_sums(const int64* table, int64 rows, const SRC* source, int64 numel, double* sums) {
  Part part = part_of_this_block(table, rows, source, numel);
  IS_GLOBAL(part.source);
  bool fits = aligned<WIDE>(part.source);
  double sum = 0;
  int64 stride = (part.stop - part.first) * THREADS * WIDE;
  for (int64 i = ((blockIdx.x - part.first) * THREADS + threadIdx.x) * WIDE; i < part.numel; i += stride) {
    Vector<SRC, WIDE> values = load<WIDE>(part.source, i, part.numel, fits && i + WIDE <= part.numel);
    float squares = 0;
#pragma unroll
    for (int k = 0; k < WIDE; ++k) squares += values.at[k].load() * values.at[k].load();
    sum += squares;
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

// A block for each tensor. Not finite if any part is not. count: of the sums, where there is no table.
extern "C" __global__ void totals(const int64* table, int64 count, const double* sums, double* result) {
  const int64* row = table + ROW * blockIdx.x;
  int64 first = table ? row[2] : 0, stop = table ? row[ROW + 2] : count;
  double sum = 0;
  for (int64 i = first + threadIdx.x; i < stop; i += THREADS) sum += sums[i];
  sum = block_sum(sum);
  if (threadIdx.x == 0) result[blockIdx.x] = sum;
}
