// Compression to signs: a bit an element and a scale for each block of 256. Formulas and layout: see signs.py.

const int GROUP = 8;    // elements of a thread: the bits of a byte
const int LANES = 32;   // a warp works on a block together
const int BLOCK = GROUP * LANES;
const float SMALLEST = 0x1p-126f;

// A warp for each block: its largest value, the root of the mean square, then bits and what is lost.
// Rows of row_blocks blocks each have a row of packed, of row_bytes bytes, a multiple of 4.
extern "C" __global__ void compress(float* values, uint8* packed, int64 row_blocks, int64 row_bytes, int64 numel) {
  bool fits = aligned<GROUP>(values);
  int64 lane = threadIdx.x % LANES;
  for (int64 b = first_index() / LANES; b < numel / BLOCK; b += index_stride() / LANES) {
    int64 i = b * BLOCK + lane * GROUP;
    int64 row = (uint32)b / (uint32)row_blocks, place = b - row * row_blocks;
    uint8* start = packed + row * row_bytes;
    float* scales = (float*)(start + row_blocks * BLOCK / 8);
    Vector<float, GROUP> x = load<GROUP>(values, i, numel, fits);
    uint32 largest = 0;  // as bits: those of NaN are larger than those of inf
#pragma unroll
    for (int k = 0; k < GROUP; ++k) {
      uint32 magnitude = FLOAT_AS_BITS(x.at[k]) & 0x7fffffff;
      largest = magnitude > largest ? magnitude : largest;
    }
    for (int mask = LANES / 2; mask > 0; mask /= 2) {
      uint32 other = __shfl_xor_sync(0xffffffff, largest, mask);
      largest = other > largest ? other : largest;
    }
    bool finite = largest < 0x7f800000;
    float most = fmaxf(BITS_AS_FLOAT(largest), SMALLEST), inverse = 1 / most, sum = 0;
#pragma unroll
    for (int k = 0; k < GROUP; ++k) {
      float part = PRODUCT(x.at[k], inverse);
      sum += PRODUCT(part, part);
    }
    for (int mask = LANES / 2; mask > 0; mask /= 2)
      sum += BITS_AS_FLOAT(__shfl_xor_sync(0xffffffff, FLOAT_AS_BITS(sum), mask));
    float scale = finite ? PRODUCT(most, sqrtf(sum / BLOCK)) : BITS_AS_FLOAT(0x7fc00000);
    if (lane == 0) scales[place] = scale;
    uint32 bits = 0;
#pragma unroll
    for (int k = 0; k < GROUP; ++k) {
      bool positive = x.at[k] >= 0;
      bits |= (uint32)positive << k;
      x.at[k] -= positive ? scale : -scale;
    }
    start[place * LANES + lane] = (uint8)bits;
    if (finite) store<GROUP>(values, i, numel, fits, x);
  }
}

// A thread for each byte. out has parts of part_blocks blocks, each the sum of as many rows of packed as added says,
// in their order: of one part many rows are added, or of many parts each has one row.
extern "C" __global__ void expand(const uint8* packed, int64 added, int64 row_bytes, int64 part_blocks, float* out,
                                  int64 numel, float factor) {
  bool fits = aligned<GROUP>(out);
  for (int64 i = first_index() * GROUP; i < numel; i += index_stride() * GROUP) {
    int64 b = i / BLOCK, part = (uint32)b / (uint32)part_blocks, first = part * part_blocks;
    Vector<float, GROUP> sums = {};
    for (int64 row = part; row < part + added; ++row) {
      const uint8* start = packed + row * row_bytes;
      uint32 bits = start[(i - first * BLOCK) / 8];
      float scale = ((const float*)(start + part_blocks * BLOCK / 8))[b - first];
#pragma unroll
      for (int k = 0; k < GROUP; ++k) sums.at[k] += bits >> k & 1 ? scale : -scale;
    }
#pragma unroll
    for (int k = 0; k < GROUP; ++k) sums.at[k] = PRODUCT(sums.at[k], factor);
    store<GROUP>(out, i, numel, fits, sums);
  }
}
