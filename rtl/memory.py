"""The one memory macro: a write port with lane enables and a synchronous read port.

It is plain Verilog with parameters, so that synthesis maps it to block RAM and a silicon flow replaces it by compiled
SRAM. Contents are undefined until written. With TRANSPARENT, a read of the row being written returns the new data.
"""

from amaranth.hdl import ClockSignal, Instance, Module, unsigned
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import ceil_log2

MEMORY_MODULE = "sharp_memory"

MEMORY_VERILOG = f"""\
module {MEMORY_MODULE} #(
  parameter LANES = 1,
  parameter LANE_BITS = 8,
  parameter DEPTH = 2,
  parameter ADDRESS_BITS = 1,
  parameter TRANSPARENT = 0
) (
  input clk,
  input [LANES-1:0] write_enable,
  input [ADDRESS_BITS-1:0] write_address,
  input [LANES*LANE_BITS-1:0] write_data,
  input [ADDRESS_BITS-1:0] read_address,
  output [LANES*LANE_BITS-1:0] read_data
);
  reg [LANES*LANE_BITS-1:0] rows [0:DEPTH-1];
  reg [LANES*LANE_BITS-1:0] read_row;
  generate
    if (LANES == 1) begin : whole
      always @(posedge clk)
        if (write_enable[0]) rows[write_address] <= write_data;
    end else begin : split
      integer lane;
      always @(posedge clk)
        for (lane = 0; lane < LANES; lane = lane + 1)
          if (write_enable[lane])
            rows[write_address][lane*LANE_BITS +: LANE_BITS] <= write_data[lane*LANE_BITS +: LANE_BITS];
    end
    if (TRANSPARENT != 0) begin : transparent
      reg hit;
      reg [LANES*LANE_BITS-1:0] written;
      always @(posedge clk) begin
        read_row <= rows[read_address];
        hit <= write_enable[0] && write_address == read_address;
        written <= write_data;
      end
      assign read_data = hit ? written : read_row;
    end else begin : plain
      always @(posedge clk) read_row <= rows[read_address];
      assign read_data = read_row;
    end
  endgenerate
endmodule
"""


class Memory(wiring.Component):
    """A memory of `depth` rows of `lanes` x `lane_bits`.

    A transparent memory has one lane, since its bypass takes whole rows.

    Members
    -------
    write_enable : In(lanes), a bit a lane
    write_address, read_address : In(bits of depth)
    write_data : In(lanes * lane_bits)
    read_data : Out(lanes * lane_bits), the row at the read address of the cycle before
    """

    def __init__(self, *, depth: int, lane_bits: int, lanes: int = 1, transparent: bool = False):
        if transparent and lanes != 1:
            raise ValueError(f"a transparent memory must have one lane, not {lanes}")
        self.depth, self.lane_bits, self.lanes, self.transparent = depth, lane_bits, lanes, transparent
        self.address_bits = max(1, ceil_log2(depth))
        super().__init__(
            {
                "write_enable": In(unsigned(lanes)),
                "write_address": In(unsigned(self.address_bits)),
                "write_data": In(unsigned(lanes * lane_bits)),
                "read_address": In(unsigned(self.address_bits)),
                "read_data": Out(unsigned(lanes * lane_bits)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.macro = Instance(
            MEMORY_MODULE,
            p_LANES=self.lanes,
            p_LANE_BITS=self.lane_bits,
            p_DEPTH=self.depth,
            p_ADDRESS_BITS=self.address_bits,
            p_TRANSPARENT=int(self.transparent),
            i_clk=ClockSignal(),
            i_write_enable=self.write_enable,
            i_write_address=self.write_address,
            i_write_data=self.write_data,
            i_read_address=self.read_address,
            o_read_data=self.read_data,
        )
        return m
