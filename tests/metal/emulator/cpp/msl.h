// Stands in for <metal_stdlib>: enough of the Metal Shading Language to compile compute kernels as host
// C++17. Written from the published specification's names and rules, not from Apple's headers.
#pragma once
#include "msl/base.h"
#include "msl/vector.h"
#include "msl/math.h"
#include "msl/simd.h"
#include "msl/matrix.h"
#include "msl/atomic.h"
#include "msl/entry.h"
