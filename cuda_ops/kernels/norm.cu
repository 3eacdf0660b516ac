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

// The sum of WIDE squares times the square of scale, in fp32.
__device__ inline float sum_of_squares(const Vector<SRC, WIDE>& values, float scale) {
  float sum = 0;
#pragma unroll
  for (int k = 0; k < WIDE; ++k) {
    float value = values.at[k].load() * scale;
    sum += value * value;
  }
  return sum;
}

// fp32 products, 16 bytes at a time, then fp64: inf and NaN come out as what they are. Squares out of fp32's range are
// taken again of the same registers times a power of two, still in fp32: many GPUs have 1/64 of the speed in fp64, and
// this kernel waits for memory anyway. See norm.py, Note [Squares out of range].
extern "C" __global__ void square_sums(const int64* table, int64 rows, const SRC* source, int64 numel, double* sums) {
  Part part = part_of_this_block(table, rows, source, numel);
  IS_GLOBAL(part.source);
  bool fits = aligned<WIDE>(part.source);
  double sum = 0;
  int64 stride = (part.stop - part.first) * THREADS * WIDE;
  for (int64 i = ((blockIdx.x - part.first) * THREADS + threadIdx.x) * WIDE; i < part.numel; i += stride) {
    Vector<SRC, WIDE> values = load<WIDE>(part.source, i, part.numel, fits && i + WIDE <= part.numel);
    float squares = sum_of_squares(values, 1);
    if (squares > 0x1p-80f && squares < 0x1p120f) sum += squares;
    else if (squares < 1) sum += sum_of_squares(values, 0x1p75f) * 0x1p-150;
    else sum += sum_of_squares(values, 0x1p-75f) * 0x1p150;
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
