// Stands in for a header that cute/arch/copy_sm90_desc.hpp includes and does not use on the device.
#pragma once
